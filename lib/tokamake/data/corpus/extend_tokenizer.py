"""Stage `extend_tokenizer`: append the tokens that T5 needs to the tokenizer of a BERT.

Data are tokenized with the tokenizer itself. Runs use the extended one.
"""

from pathlib import Path

from tokamake.data.tokenizers import open_tokenizer, tokenizer_files
from tokamake.data.tokenizers._sentinels import write_extended
from tokamake.errors import UserError

_MAX_SENTINELS = 10_000


def extend_tokenizer(*, tokenizer: Path, sentinels: int = 100, output: Path) -> None:
    """Append [BOS], [EOS] and sentinels to a tokenizer, for span corruption.

    All other tokens keep their ids. Datasets of the tokenizer can be used with the extended one.

    Args:
        tokenizer: File or folder of a tokenizer.json or of BERT's vocab.txt.
        sentinels: Number of sentinels: <extra_id_0>, <extra_id_1> and so on.
        output: Folder for tokenizer.json and tokenizer_config.json.
    """
    if not 1 <= sentinels <= _MAX_SENTINELS:
        raise UserError(f"--sentinels: {sentinels}: give 1 to {_MAX_SENTINELS:,}")
    _, paths = tokenizer_files(tokenizer)
    opened = open_tokenizer(tokenizer)
    write_extended(opened, sentinels, paths=paths, output=output)
    print(f"{output}: {opened.vocab_size + sentinels + 2:,} entries, {sentinels} are sentinels")
