"""Row gathers and fills."""
