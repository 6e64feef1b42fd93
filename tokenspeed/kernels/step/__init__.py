"""What begins and ends a captured step."""
