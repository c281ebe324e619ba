"""What a deployment will need, before it is bought: `draftalign plan`. How wrong it is: docs/lab/capacity.md."""
