"""The drift alarm: numbers in, alarm out."""
