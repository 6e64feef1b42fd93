"""The lower tiers of the KV cache: host memory, and storage behind it. What is where is the scheduler's to decide; here pages
are copied as its transfers say, and every transfer is answered once."""
