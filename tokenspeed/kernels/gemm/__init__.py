"""Matrix products of activations and weights."""
