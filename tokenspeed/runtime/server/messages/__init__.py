"""Messages, Anthropic's wire: what Claude Code speaks."""
