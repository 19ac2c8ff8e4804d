"""The rule checker: whether the equalities and facts that a rule states are true."""
