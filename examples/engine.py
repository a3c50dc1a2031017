"""Requests that come and go share steps and pages; what one gets does not depend on the others, to the last bit."""

import microllm

llm = microllm.load("demo", precision="fp32")
engine = microllm.Engine(llm, microllm.EngineConfig(max_rows=4, max_context=256, speculate=4))
params = microllm.SamplingParams(temperature=0, max_tokens=12, logprobs=0)


def ask(question: str) -> list[int]:
    system = {"role": "system", "content": "You answer in one short sentence, and say so when you do not know."}
    return llm.tokenizer.encode_chat([system, {"role": "user", "content": question}])


(first,) = engine.add(ask("What is the capital of France?"), params)
engine.step()  # the prompt runs, and its first token is there
(second,) = engine.add(ask("Why is the sky blue?"), params)
(third,) = engine.add(ask("Who was Ada Lovelace?"), params)
engine.step()
engine.cancel(third)  # its pages are free at once
while engine.has_work:
    engine.step()
for request in (first, second, third):
    found = f"{request.cached_prefix_tokens} of {request.prompt_length} prompt tokens found in the cache"
    print(request.finish_reason, repr(request.completion.text), found)

alone = microllm.Engine(llm, microllm.EngineConfig(scheduler="serial", max_context=256))
one, other = second.completion, alone.generate(ask("Why is the sky blue?"), params)
print("the same bits alone:", (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs))
with engine.stream("1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2,", params) as pieces:
    print("".join(piece.text for piece in pieces))
report = engine.report()
print(f"{report.num_steps} steps; {report.num_drafts_accepted} of {report.num_drafts_proposed} guessed tokens accepted")
print(f"{report.kv.allocated_bytes:,} bytes of KV cache, {report.kv.active_bytes:,} of them in use")
