"""Several prompts in one batch, several choices each; a row's tokens do not depend on its neighbours."""

import microllm

llm = microllm.load("demo")
params = microllm.SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, seed=7, n=2, stop=["\n"])
prompts = ["The moon is", "In the beginning God created", "def fibonacci(n):"]
together = llm.generate(prompts, params)
for completion in together:
    print(completion.index, repr(completion.text))
alone = llm.generate(prompts[1:2], params)
print("the same tokens alone:", [c.token_ids for c in alone] == [c.token_ids for c in together[2:4]])
