"""What the figures mean: α series, drift, controller, live against replay, headline, metrics. Imports nothing of ours."""
