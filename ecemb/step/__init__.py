"""A step is a transaction: `transaction` drives it, `agreement` is among ranks, `window` groups steps."""
