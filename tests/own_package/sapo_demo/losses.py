import torch

from sapo.learn.loss import LossInputs, LossOutputs, outputs, ratio_to_old


def reinforce(inputs: LossInputs) -> LossOutputs:
    """Log-probability times advantage (REINFORCE), with neither ratio nor clip."""
    ratio = ratio_to_old(inputs)
    terms = -ratio.advantages * ratio.logprobs
    return outputs(terms, torch.zeros_like(ratio.used), ratio, inputs.normaliser)
