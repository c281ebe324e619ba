"""What the API's handlers share."""
