"""The real scheduler on a virtual clock: what a policy does to agents' traffic, in seconds and without a model."""
