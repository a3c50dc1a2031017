"""Answer one question with the demo model."""

import microllm

llm = microllm.load("demo")
question = {"role": "user", "content": "What is the capital of France?"}
answer = llm.chat([question], microllm.SamplingParams(temperature=0, max_tokens=32))
print(answer.text)
print(f"{len(answer.token_ids)} tokens, ended by {answer.finish_reason}, first after {answer.timings.ttft_ms:.0f} ms")
