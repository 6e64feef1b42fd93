"""The HTTP server: OpenAI's wire formats on one AsyncLLM.

Start it with `serve.serve`; embed it with `app.create_app`.
"""
