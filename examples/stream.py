"""Print an answer as it is made, and stop in the middle: closing the stream cancels what is left."""

import microllm

llm = microllm.load("demo")
messages = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Why is the sky blue?"},
]
with llm.chat(messages, microllm.SamplingParams(temperature=0, max_tokens=64), stream=True) as pieces:
    num_tokens = 0
    for piece in pieces:
        print(piece.text, end="", flush=True)
        num_tokens += len(piece.token_ids)
        if num_tokens == 16:
            break
print()
print(pieces.completion.finish_reason)
