"""The law of the next token after temperature and filters, for the rows of a pass."""
