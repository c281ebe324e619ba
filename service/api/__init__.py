"""The HTTP API: one process, no torch. Who may call, what is accepted, and how every answer is made."""
