"""The objective retro: predict the next token, with the neighbors of earlier chunks in sight."""
