"""The training program: `accelerate launch train CONFIG [section.key=value ...]`.

It depends on the library `layerskip` and never on the program `infer`; what training must tell inference
travels in the checkpoint.
"""
