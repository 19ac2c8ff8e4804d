"""User-defined operations and monoids."""
