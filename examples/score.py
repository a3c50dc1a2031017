"""Ask how likely the model finds a text, token by token."""

import microllm

llm = microllm.load("demo")
for text in ("The cat sat on the mat.", "The cat sat on the moon.", "Mat the on sat cat the."):
    score = llm.score(text)
    print(f"perplexity {score.perplexity:8.1f}  {text}")
score = llm.score("The capital of France is Paris.")
for token_id, logprob in zip(score.token_ids, score.logprobs, strict=True):
    shown = "  first" if logprob is None else f"{logprob:7.2f}"
    print(shown, repr(llm.tokenizer.decode([token_id])))
