"""Bridges to other libraries, one module each, imported on request: transformers, and torch's DTensor."""
