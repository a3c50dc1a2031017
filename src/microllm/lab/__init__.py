"""The lab: what measures whole models, and the experiments that change them."""
