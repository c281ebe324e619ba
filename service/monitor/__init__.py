"""What the figures mean: α, drift, controller, engines against replay, headline, metrics. Imports nothing of ours."""
