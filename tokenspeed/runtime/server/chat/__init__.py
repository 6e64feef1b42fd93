"""Chat completions, OpenAI's older wire: what nearly every client speaks."""
