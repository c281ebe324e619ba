"""The swap agent: brings the service's newest drafter into engines, and their counters back."""
