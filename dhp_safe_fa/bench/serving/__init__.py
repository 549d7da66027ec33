"""What a server asks for: decoding over long caches, packed sequences, caches in pages."""
