"""Torch's attention and FlashAttention-3 under the same gates: audits/peers.md."""
