"""OpenVINO GenAI with continuous batching; threads and precision of activations and KV cache as it chooses them for this CPU."""

from typing import Any

import numpy as np
import openvino
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig
from serve import Answers, Requests, serve


class OpenVINO:
    def __init__(self, settings: dict[str, Any]) -> None:
        scheduler = SchedulerConfig()
        scheduler.cache_size = 1  # GiB
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
        self._pipeline = ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self.times: list[list[float]] = []

    def prepare(self, requests: Requests) -> None:
        """It has no call that empties its prefix cache; no two calls send the same prompt."""

    def generate(self, requests: Requests) -> Answers:
        prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in requests]
        configs = [GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False) for _, count in requests]
        return [list(result.m_generation_ids[0]) for result in self._pipeline.generate(prompts, configs)]


if __name__ == "__main__":
    serve(OpenVINO)
