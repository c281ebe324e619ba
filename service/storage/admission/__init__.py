"""What is checked of weights before a run takes them."""
