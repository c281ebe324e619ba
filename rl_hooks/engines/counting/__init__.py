"""Verification rounds and step times that engines count, by drafter version and policy version."""
