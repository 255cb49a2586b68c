"""How a vLLM scheduler and its worker take requests through a connector: turn by turn, with vLLM's own managers."""

from types import SimpleNamespace

from kvcore.interop import vllm_connector


class Requests:
    """A connector on both sides of vLLM's managers; who derives from it is the model.

    Attributes:
        scheduler, worker: the two sides of the connector.
        managers: vLLM's, one a group of layers.
        failed: loads that were not done.
        computed: tokens that no hit spared.
    """

    def __init__(self, base, managers, extra, config):
        sides, kind = base.KVConnectorRole, vllm_connector.KvcoreConnector
        assert base.supports_hma(kind)
        told = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
        self.scheduler, self.worker = (kind(told, side, config) for side in (sides.SCHEDULER, sides.WORKER))
        self.managers = managers
        self.computed, self.failed = 0, 0

    def check(self, tokens, tables, length):
        """What the token behind so many of them looks at is the model's."""
        raise NotImplementedError

    def write(self, tokens, start, end, tables):
        """What the model writes of these tokens."""
        raise NotImplementedError

    def tables(self, name):
        return [[block.block_id for block in manager.req_to_blocks[name]] for manager in self.managers]

    def load(self, request, matched):
        """Begin an asynchronous load; whether it was done."""
        name = request.request_id
        for manager in self.managers:
            manager.add_local_computed_blocks(name, [], 0, matched)
        for manager in self.managers:
            manager.allocate_external_computed_blocks(name, 0, matched)
        self.scheduler.update_state_after_alloc(
            request, SimpleNamespace(get_block_ids=lambda: self.tables(name)), matched
        )
        self.turn([], [], {})
        results = self.worker.get_transfer_results(set())
        assert results.finished_recving == {name}
        assert self.worker.get_transfer_results(set()).finished_recving == set()
        if results.failed_recving:
            for manager in self.managers:
                manager.free(name)
        return not results.failed_recving

    def turn(self, new, cached, counts, write=lambda: None):
        names, more, computed = zip(*cached, strict=True) if cached else ((), (), ())
        again = SimpleNamespace(
            req_ids=list(names), new_block_ids=list(more), num_computed_tokens=list(computed), resumed_req_ids=set()
        )
        output = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=again, num_scheduled_tokens=counts)
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(None)
        write()
        self.worker.wait_for_save()
        assert self.worker.get_block_ids_with_load_errors() == set()
        self.worker.clear_connector_metadata()

    def run(self, name, tokens, step=24):
        """Prefill a prompt, some tokens at a time; the tokens that were found."""
        request = SimpleNamespace(request_id=name, prompt_token_ids=tokens, num_computed_tokens=0)
        matched, later = self.scheduler.get_num_new_matched_tokens(request, 0)
        while matched:
            assert later
            if self.load(request, matched):
                break
            self.failed += 1
            matched, later = self.scheduler.get_num_new_matched_tokens(request, 0)
        start = request.num_computed_tokens = matched
        before = self.tables(name)
        while start < len(tokens):
            if start:
                self.check(tokens, before, start)
            end = min(start + step, len(tokens))
            for manager in self.managers:
                manager.remove_skipped_blocks(name, start)
                manager.allocate_new_blocks(name, end, end)
            tables = self.tables(name)
            fresh = [table[len(old) :] for table, old in zip(tables, before, strict=True)]
            first = start == matched
            new = [SimpleNamespace(req_id=name, block_ids=tables, num_computed_tokens=start)] if first else []
            more = [] if first else [(name, fresh, start)]

            def write(start=start, end=end, tables=tables):
                self.write(tokens, start, end, tables)

            self.turn(new, more, {name: end - start}, write)
            self.computed += end - start
            start, before = end, tables
        self.check(tokens, before, start)
        assert self.scheduler.request_finished_all_groups(request, tuple(self.tables(name))) == (False, None)
        for manager in self.managers:
            manager.free(name)
        return matched
