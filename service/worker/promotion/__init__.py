"""Who may replace the served drafter: `gate` decides, the other files are what it knows."""
