"""How many held-out questions the exam at the end asks: as many as suit the run, where none are named."""

from sapo.core.config.load import Config

PART = 5
"""The exam's answers are one in so many of those that the rounds take."""
FEWEST, MOST = 50, 2000
VERSIONS = 2
"""The most earlier versions of a node that the exam at the end asks too."""


def exam_size(config: Config) -> int:
    """Questions of a site's exam: `eval.questions`, or what suits the run."""
    if config.eval.questions is not None:
        return config.eval.questions
    # nobody knows how many rounds there will be in a given time
    answers = 0 if config.swarm.seconds else answers_of_rounds(config)
    fitting = answers // PART // answers_to_each(config, len(config.nodes))
    probes = [config.for_node(name).eval.probe_questions for name in config.nodes]
    return min(max(FEWEST, fitting, *probes), max(MOST, *probes))


def answers_of_rounds(config: Config) -> int:
    """Answers that the nodes of a site give in all their rounds."""
    batches = [config.for_node(name).batch for name in config.nodes]
    return config.swarm.rounds * sum(batch.b * batch.completions for batch in batches)


def answers_to_each(config: Config, nodes: int) -> int:
    """Answers to one question of the exam, by so many nodes that are alike and the policy they start from.
    Earlier versions are asked too, sampled only."""
    samples = config.eval.samples
    versions = min(VERSIONS, max(0, config.swarm.rounds - 1) // config.track.register_every)
    return (nodes + 1) * (samples + 1) + nodes * versions * samples


def sized(config: Config) -> Config:
    """A config that names its questions: a run keeps those it began with, however many rounds are added."""
    exam = config.eval.model_copy(update={"questions": exam_size(config)})
    return config.model_copy(update={"eval": exam})


def foretold(config: Config) -> str:
    """What the exam takes, in one line."""
    questions, seconds = exam_size(config), config.swarm.seconds
    answers = questions * answers_to_each(config, len(config.nodes))
    beside = f"have {seconds:g} s" if seconds else f"give {answers_of_rounds(config):,}"
    return f"exam at the end: {questions:,} questions, about {answers:,} answers; the rounds {beside}"
