"""The characters that byte-level vocabularies use for bytes."""


def byte_alphabet() -> dict[int, str]:
    """Return the character of each byte in GPT-2's and all later byte-level vocabularies."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + rank) for rank, byte in enumerate(hidden)
    }
