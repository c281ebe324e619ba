"""Replay α: what a drafter would have had on logged rollouts; the gate that judges it; n-gram drafting beside it."""
