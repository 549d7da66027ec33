"""Builds: kept or made again (keeping), and called side by side through the C ABI (library with abi, launch)."""
