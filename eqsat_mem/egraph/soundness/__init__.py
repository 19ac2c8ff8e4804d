"""The rule checker: does a rule say what is true?"""
