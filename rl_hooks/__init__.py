"""What runs beside someone else's code: feature capture, the sender, trainer adapters, the swap agent.

Importing this package costs NumPy and nothing else: no torch, no FastAPI, no Redis, no transformers.
It never imports `drafter` or `service`.
"""
