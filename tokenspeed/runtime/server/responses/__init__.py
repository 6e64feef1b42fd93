"""Responses, OpenAI's newer wire: what Codex CLI speaks."""
