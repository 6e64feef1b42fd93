"""`tokenspeed bench`: load on a server from outside, and what its users feel."""
