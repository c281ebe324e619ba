"""From captured states to the service: features, registration, and a sender that never blocks."""
