"""What the figures mean: α series, drift, controller, dead drafters, headline, metrics. Imports nothing of ours."""
