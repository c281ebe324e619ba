"""What a drafter's files must say, and what a run must send: one definition, without torch."""
