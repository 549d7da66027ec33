"""The gate `sass`: machine code in, a verdict for each kernel out (docs/gates-sass.md). Needs no torch, no GPU."""
