"""What happened to a run: files of JSON lines that only grow, and what is known from them."""
