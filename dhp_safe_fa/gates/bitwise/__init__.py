"""The gate `bitwise`: the same bytes in every run and in any company (docs/gates-bitwise.md)."""
