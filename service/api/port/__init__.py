"""The API's side of a TCP connection: its limits, TLS, and the way of a long body to a file."""
