"""How a vocabulary is cut for laws, and the vocabularies of the published and small models."""


def block_of(vocabulary: int) -> int:
    """Tokens of one block of the two-level draw: about the square root of V, a power of two."""
    return 1 << (vocabulary.bit_length() // 2)


VOCABULARIES = {"v4-flash": 129280, "v4.1-flash": 129280, "demo": 4160}
