"""Operations and monoids that users define."""
