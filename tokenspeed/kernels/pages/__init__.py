"""Pages of the KV caches as rows of bytes."""
