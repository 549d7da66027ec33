"""The backward pass, and forward and backward together: cases, candidates and what is right for them."""
